"""What several test files share. Nothing here is a test."""
