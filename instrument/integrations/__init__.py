"""Sessions inside trainers of other packages: Lightning, Transformers, Accelerate, Ignite."""
