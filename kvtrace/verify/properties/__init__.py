"""The properties, by what they are about. A row of a file's ``PROPERTIES`` is one whole property."""
