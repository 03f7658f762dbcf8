"""The door over HTTP: OpenAI's interface, and a page, in front of a router."""
