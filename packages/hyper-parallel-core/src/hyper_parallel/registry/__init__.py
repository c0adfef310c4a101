"""Which rule serves which function, from the installed plugins' tables and the user's registrations."""
