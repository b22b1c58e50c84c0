"""What indexing and embeddings allocate: sorted indices, and copies of indices from the host."""
