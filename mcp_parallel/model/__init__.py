"""The Llama-family model; how it is spread over ranks is applied from outside (``parallel/``)."""
