"""What a person looks at, made from captures alone."""
