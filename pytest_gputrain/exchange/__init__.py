"""Reports in the formats of other tools; `pytest_gputrain.exchange.formats` names them."""
