"""Expert parallelism on several GPUs of one host: measured against one GPU, against plain torch, and in its parts.
`launch` starts a process for each GPU, `run` is what each of them does."""
