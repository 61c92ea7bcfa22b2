"""A build: plan, Beam graph, shard writer, receipts, manifest."""
