"""The lab: is speculation exact, and does it pay?"""
