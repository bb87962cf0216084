"""What a configuration must hold to, one family a file; ``mcp_parallel.check`` runs all."""
