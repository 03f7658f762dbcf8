"""The shell of every stage server: sessions, credit, route, metrics, load reports, drain."""
