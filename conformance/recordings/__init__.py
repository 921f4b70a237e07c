"""Did a real run obey? Recordings of real engines, and TLC's verdict on them."""
