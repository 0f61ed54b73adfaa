"""The parts behind `Queue`: the ends of producers and consumers, and the gate that bounds the age of items."""
