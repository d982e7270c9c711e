"""What a regulated operator needs of a store: a record of what was done that nobody can edit, and keys that can go."""
