"""Methods: ways to answer questions with an engine; a method maps (records, engine) to a prediction a record."""
