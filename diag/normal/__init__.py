"""The normal speed of a server under its load: measured, kept in a baseline file, compared. Data only, no printing."""
