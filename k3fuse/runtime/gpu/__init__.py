"""A bundle on a GPU: memory, bound launches, one CUDA graph a bucket, and the ranks' modes."""
