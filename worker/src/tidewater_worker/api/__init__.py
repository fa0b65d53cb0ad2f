"""The HTTP edge: routes, wire formats, errors as status codes."""
