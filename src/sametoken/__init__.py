"""sametoken: speculative decoding for mixture-of-experts models that changes no bit."""

__version__ = "0.1.0"
