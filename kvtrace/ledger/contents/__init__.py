"""Whether loads gave back what was computed: fingerprints of KV, compared by prefix, place and rank."""
