"""Text to token files, once before training: documents, tokens, parts, one checksummed file."""
