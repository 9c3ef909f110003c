"""What crosses process borders: control messages, event frames, KV frames. No sockets."""
