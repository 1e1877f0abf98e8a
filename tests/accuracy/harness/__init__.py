"""Runs generated connectors on a real engine and finds out what is true of each run, without kvtrace."""
