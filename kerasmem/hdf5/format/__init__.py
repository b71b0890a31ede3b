"""What a file says: layouts, chunk indices and filters, without opening anything."""
