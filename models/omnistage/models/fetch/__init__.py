"""What is fetched before a model is loaded, and the folders that it comes to."""
