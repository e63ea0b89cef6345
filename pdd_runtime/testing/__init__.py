"""What plugin authors use: a conformance suite per contract, and a scripted engine that needs no model."""
