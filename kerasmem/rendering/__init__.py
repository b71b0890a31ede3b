"""Shows results as tables, text, CSV and HTML. Imports result classes only."""
