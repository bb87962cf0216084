"""Model families; how a model is spread over ranks is applied from outside (``parallel/``)."""
