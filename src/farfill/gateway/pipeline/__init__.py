"""The steps of a request, in order: authenticate, admit, tokenize, hash, place, dispatch, stream."""
