"""Models: tokenizers, torch models from nothing or from a Hugging Face folder, weights as bytes."""
