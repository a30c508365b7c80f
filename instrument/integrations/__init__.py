"""Sessions inside other people's trainers: Lightning, Transformers, Accelerate, Ignite."""
