"""One reader per kind of file or folder; `stretto.data.open_sequences` chooses among them."""
