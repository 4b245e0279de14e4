"""Things to play with. Each is a view over a plain function that is tested without a browser."""
