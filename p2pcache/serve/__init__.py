"""Serving with the cache: engines behind Ray Serve, routed by locality, admitted by memory."""
