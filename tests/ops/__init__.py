"""Every entry of torch's `op_db`, lazily and eagerly: the two must agree bit for bit."""
