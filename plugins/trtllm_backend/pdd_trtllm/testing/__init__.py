"""A stand-in for `trtllm-serve`, as strict as what is known of the real one: a process of its own, with its command
line, its configuration file, its HTTP API and its way to call a KV connector, over a model of hashes instead of
weights."""
