"""The places, for one more version, from which families of other packages imported before there was `omnistage.models.kit`."""
