"""What a connector's work does with the KV caches: which slots it reads and writes."""
