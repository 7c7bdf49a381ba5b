"""KITE's pool behind the engines that others run. Each integration imports its engine only when it is used."""
