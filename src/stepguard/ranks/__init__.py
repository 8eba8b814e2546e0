"""All that knows about several processes: agreement, one decision, shards, copies, hung ranks."""
