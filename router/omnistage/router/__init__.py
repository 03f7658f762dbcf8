"""The router: takes client requests in, places each answer on stage replicas and merges what they send."""
