"""The KV cache as data: prefix keys, the manifest, codecs, the prefix index. Pure."""
