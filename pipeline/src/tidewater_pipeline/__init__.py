"""The Spark jobs of Tidewater: everything heavy over a topic's history."""
