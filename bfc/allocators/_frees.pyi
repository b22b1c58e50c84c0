VIEWED: str
PUT_OFF: str

class Frees: ...
