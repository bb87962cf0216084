"""What a run leaves behind and shows while it trains: run folder, metrics, progress."""
