"""Networks in their layouts: stages, engines, backends; and the interfaces that use them."""
