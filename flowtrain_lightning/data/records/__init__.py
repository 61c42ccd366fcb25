"""A record of any form, as the tokens that its template makes of it."""
