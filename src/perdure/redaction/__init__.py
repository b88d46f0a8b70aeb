"""What a redaction does to what tells of messages. It is the same in a store and in a record."""
