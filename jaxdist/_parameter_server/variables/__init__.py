"""Variables on servers, as the user sees them."""
