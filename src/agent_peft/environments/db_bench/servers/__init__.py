"""MariaDB and MySQL servers for DB Bench: one of our own, or one that the user names."""
