"""The one TLC toolbox: Java and jar, launcher, configurations, values, state graphs."""
