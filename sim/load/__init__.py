"""Load tests of any OpenAI-compatible endpoint: scenarios, a locustfile, and ``kvway load``."""
