"""The HTTP server: OpenAI's routes in front of one engine thread."""
