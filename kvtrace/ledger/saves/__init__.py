"""The ledger of saves: what became of every position with KV, in every (layer, rank) pair."""
